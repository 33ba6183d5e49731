"""What is learned from: rewards, advantages, corrections, losses. Plain functions of tensors, no state.

scores ─▶ shaping ─▶ advantages ─▶ corrections ─▶ objective (losses, kl), which the engines differentiate
"""
