"""The comparison of asyncrl with what people would pick instead, on the same work and the same cores."""
