"""Parameters as views of one vector."""

import torch

from kt_ray.optim.flat_parameters import FlatParameters, views


def test_parameters_are_views_and_gradients_are_added_to_them() -> None:
    start = {"a": torch.randn(2, 5), "b": torch.randn(3), "c": torch.randn(8, 16)}
    parameters = {name: torch.nn.Parameter(value.clone()) for name, value in start.items()}
    flat = FlatParameters(parameters, torch.device("cpu"))
    assert all(torch.equal(parameters[name], value) for name, value in start.items())
    for factor in (2.0, 3.0):
        sum((factor * p).sum() for p in parameters.values()).backward()  # type: ignore[union-attr]
    assert all((grad == 5.0).all() for grad in flat.by_name(flat.grads).values())
    assert flat.grads.sum() == 5.0 * sum(value.numel() for value in start.values())  # zeros between them
    flat.values.mul_(2.0)
    assert all(torch.equal(parameters[name], 2.0 * value) for name, value in start.items())


def test_parameters_follow_the_vectors() -> None:
    parameters = {name: torch.nn.Parameter(torch.ones(shape)) for name, shape in (("a", (2, 3)), ("b", (4,)))}
    flat = FlatParameters(parameters, torch.device("cpu"))
    flat.values.data, flat.grads.data = torch.full_like(flat.values, 7.0), torch.full_like(flat.grads, 8.0)
    assert (parameters["b"] == 1.0).all()
    flat.find()
    for parameter in parameters.values():
        assert (parameter == 7.0).all() and parameter.grad is not None and (parameter.grad == 8.0).all()


def test_each_begins_where_memory_of_its_own_would() -> None:
    """What a product adds up in which order may depend on where its operands lie."""
    shapes = {"a": (3, 7), "b": (1,), "c": (130,), "d": (5, 5)}
    parameters = {name: torch.nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()}
    flat = FlatParameters(parameters, torch.device("cpu"))
    places = [view.data_ptr() - flat.values.data_ptr() for view in views(flat.values, shapes)]
    assert places == [0, 256, 512, 1280]
    assert flat.values.numel() * 4 == 1280 + 256
