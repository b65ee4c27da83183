"""The certificate of a run: results of the checks that are possible before its job is queued, in sections."""
