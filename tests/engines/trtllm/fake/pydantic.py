"""As far as it is needed to check options."""


class ValidationError(ValueError):
    def errors(self):
        return [{"msg": str(self)}]


class TypeAdapter:
    def __init__(self, kind):
        self.kind = kind

    def validate_python(self, value):
        if not isinstance(value, self.kind):
            raise ValidationError(f"Input should be a valid {self.kind.__name__}")
        return value
