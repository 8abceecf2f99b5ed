"""Bridges to array libraries, one module each; a module is imported when an object of its library is met."""
