"""TAO as a Ray Serve application."""
