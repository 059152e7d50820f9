"""Engines: what moves bytes between workers, each behind `transport.Communicator`."""
