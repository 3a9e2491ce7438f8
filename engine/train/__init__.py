"""Training of draft heads. Serving code never imports this package."""
