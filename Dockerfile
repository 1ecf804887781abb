# The control plane's image: operator and scheduler, which differ in the command only (`python -m rlinf_operator`,
# `python -m rlinf_scheduler`). No torch, no compiler: everything in the control extra has a wheel.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
COPY constraints/all.txt constraints/all.txt
COPY pyproject.toml README.md LICENSE ./
COPY rlinf_api rlinf_api
COPY operator operator
COPY rlinf_worker rlinf_worker
COPY rljob rljob
RUN python -m venv /opt/rlinf \
 && /opt/rlinf/bin/pip install --no-cache-dir --constraint constraints/all.txt ".[control]"

FROM ${PYTHON_IMAGE}
COPY --from=build /opt/rlinf /opt/rlinf
ENV PATH=/opt/rlinf/bin:$PATH PYTHONUNBUFFERED=1
# A number, as the kubelet cannot check runAsNonRoot against a name.
USER 65532:65532
WORKDIR /tmp
ENTRYPOINT ["python", "-m"]
CMD ["rlinf_operator"]
