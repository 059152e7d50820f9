"""The words everything else is written in: values, options, devices, nests, reports and errors (floor 1)."""
