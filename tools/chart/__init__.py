"""Checks of helm/rlinf-operator without a cluster: `make chart-check`, `make chart-snapshots`, and `make images`.

rendering.py   the chart rendered for every file of cases/, a matrix of values
schemas.py     strict JSON schemas for kubeconform, from Kubernetes' own OpenAPI description
images.py      builds the Dockerfiles with BuildKit
"""
