"""Generated from rlinf_api/proto by tools/gen_protos.py; not for editing."""
