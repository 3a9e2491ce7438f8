"""Deployment artefacts: renderings of one launch record. What was measured is what is deployed, byte for byte."""
