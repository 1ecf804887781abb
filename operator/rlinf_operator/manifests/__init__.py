"""Pure rendering of what the operator creates: pods, Service, Secrets with certificates, ConfigMap."""
