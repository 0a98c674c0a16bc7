"""Scout inside agent frameworks: one module a framework, one extra a module."""
