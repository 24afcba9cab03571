"""The command line: demo, explanations, tuners, traces."""
