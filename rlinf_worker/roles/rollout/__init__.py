"""The rollout role: policy inference."""
