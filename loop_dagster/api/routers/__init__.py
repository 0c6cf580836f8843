"""One router per resource: a route reads its parameters, calls the stores and answers rows; it decides no rule."""
