"""Engines: they exchange bytes between workers; each implements `transport.Communicator`."""
