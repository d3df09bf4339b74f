"""Transfer of weight versions into the engines, as the controller coordinates it."""
