"""Rewards, advantages, off-policy corrections and losses: plain functions of tensors, without state.

scores ─▶ shaping ─▶ advantages ─▶ corrections ─▶ objective (losses, kl), which the engines differentiate
"""
