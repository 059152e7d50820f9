"""`aiodist doctor`: what is there on this machine, what works, and what to install for what does not."""
