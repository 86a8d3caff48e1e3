"""Faces of other libraries over this engine: code that was written for them changes an import."""
