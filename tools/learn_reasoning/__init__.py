"""Whether flow grpo learns what a plain script learns: `make learn-reasoning`, docs/learning/reasoning.md."""
