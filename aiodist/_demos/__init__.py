"""The demos of the command line: real training, and an error on purpose.

Modules, each of which imports only earlier ones: interruption, terminal, model, corpus, training, text, mismatch.
"""
