"""Execution of one run under one claim: its context, steps, waits and journal writes."""
