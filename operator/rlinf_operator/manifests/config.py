"""The ConfigMap with job.json: the RLJob's spec without its defaults, which an image from before a field can read, too.
Never a plan: PreparePlan brings those. Pure."""

from __future__ import annotations

import json
from datetime import datetime

from rlinf_api import names, times, unknown
from rlinf_api.job import RLJobSpec
from rlinf_operator.manifests.metadata import JobMeta, Manifest, digest, labels, metadata

OF_THE_OPERATOR = ("suspend", "ttlSecondsAfterFinished", "activeDeadlineSeconds")  # a driver reads none of them


def job_json(spec: RLJobSpec) -> str:
    return json.dumps(unknown.compact(spec), indent=1, sort_keys=True) + "\n"


def inputs_hash(spec: RLJobSpec) -> str:
    """A hash of what a driver reads in job.json. It covers more than makes the driver's pod anew, as the next driver
    must know how many pods and restarts the spec allows by now. Defaults are left out, so that a newer operator finds
    the same hash."""
    return digest({key: value for key, value in unknown.compact(spec).items() if key not in OF_THE_OPERATOR})


def config_map(job: JobMeta, spec: RLJobSpec, *, certificates_expire: datetime | None, issuer: str = "") -> Manifest:
    """Created after the job's Secrets; its annotations say when they expire and which CA signed them."""
    annotations = {names.ANNOTATION_INPUTS: inputs_hash(spec)}
    if certificates_expire is not None:
        annotations[names.ANNOTATION_CERT_EXPIRY] = times.text(certificates_expire)
    if issuer:
        annotations[names.ANNOTATION_CERT_ISSUER] = issuer
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(job, names.config_name(job.name), label=labels(job), annotations=annotations),
        "data": {names.JOB_FILE: job_json(spec)},
    }
