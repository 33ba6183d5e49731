"""The sections of the schema, by what they are about; `asyncrl.config.schema` has them all."""
