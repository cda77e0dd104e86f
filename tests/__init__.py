"""The tests: unit, integration, conformance and faults, all against real servers."""
