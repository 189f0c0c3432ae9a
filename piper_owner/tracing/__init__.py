"""Traces of runs: what each rank did when, measured or predicted, in a form that viewers read. Pure."""
