"""Generates text and scores tokens with a trained model on any layout. To generate, the stages of training run once per
token.
"""
