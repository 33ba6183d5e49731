"""The run's OpenAI endpoint for agents of the user's own: what is asked with a trajectory's key is recorded.

    agent ──HTTP──▶ asgi ──▶ gateway ──▶ session ──▶ ask: the engines          a turn, its tokens recorded
                    (Serve)   key ─▶ session   └──▶ recording ──▶ Trajectory   when the agent has ended

docs/agents-openai.md is its page.
"""
