"""The run's OpenAI-compatible endpoint for users' own agents: it records the turns requested with a trajectory's key.

    agent ──HTTP──▶ asgi ──▶ gateway ──▶ session ──▶ ask: the engines          a turn, its tokens recorded
                    (Serve)   key ─▶ session   └──▶ recording ──▶ Trajectory   when the agent has ended

See docs/agents-openai.md.
"""
