"""Gradients as FP8 messages between ranks."""
