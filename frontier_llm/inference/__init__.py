"""Generates text and scores tokens with a trained model on any layout. Generation uses the pipeline stages of training,
and runs them once per token.
"""
