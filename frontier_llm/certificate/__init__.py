"""The certificate of a run: what can be proved before its job is queued, section by section."""
