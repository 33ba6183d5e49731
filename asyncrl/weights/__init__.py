"""The versioned weight store: the Trainer publishes versions, and the engines' replicas fetch them."""
