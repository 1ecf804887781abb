"""The ConfigMap with job.json: the RLJob's spec with its defaults. Never a plan: PreparePlan brings those. Pure."""

from __future__ import annotations

import json
from datetime import datetime

from rlinf_api import job as api
from rlinf_api import names, times
from rlinf_api.job import RLJobSpec
from rlinf_operator.manifests.metadata import JobMeta, Manifest, inputs_hash, labels, metadata


def job_json(spec: RLJobSpec) -> str:
    return json.dumps(api.dump(spec), indent=1, sort_keys=True) + "\n"


def config_map(job: JobMeta, spec: RLJobSpec, *, certificates_expire: datetime | None) -> Manifest:
    """Created after the job's Secrets; its annotation is where their expiry can be read without reading Secrets."""
    annotations = {names.ANNOTATION_INPUTS: inputs_hash(spec)}
    if certificates_expire is not None:
        annotations[names.ANNOTATION_CERT_EXPIRY] = times.text(certificates_expire)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(job, names.config_name(job.name), label=labels(job), annotations=annotations),
        "data": {names.JOB_FILE: job_json(spec)},
    }
