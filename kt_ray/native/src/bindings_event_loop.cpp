// The event loop for Python: strings and tags become numbers, and come back as what they were.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <tuple>
#include <utility>
#include <vector>

#include "event_loop.h"

namespace py = pybind11;

namespace {

// Numbers of hashable Python objects, in the order in which they were first seen.
class Numbers {
  public:
    int32_t of(PyObject* key) {
        if (PyObject* known = PyDict_GetItemWithError(numbers_.ptr(), key))
            return static_cast<int32_t>(PyLong_AsLong(known));
        if (PyErr_Occurred()) throw py::error_already_set();
        const auto number = static_cast<int32_t>(keys_.size());
        keys_.push_back(py::reinterpret_borrow<py::object>(key));
        if (PyDict_SetItem(numbers_.ptr(), key, py::int_(number).ptr())) throw py::error_already_set();
        return number;
    }

    int32_t of(const char* key) { return of(py::str(key).ptr()); }
    const py::object& operator[](int32_t number) const { return keys_[number]; }
    int32_t size() const { return static_cast<int32_t>(keys_.size()); }

  private:
    py::dict numbers_;
    std::vector<py::object> keys_;
};

PyObject* field(PyObject* tuple, Py_ssize_t i, Py_ssize_t size) {
    if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) != size)
        throw py::type_error("an item of a program: (name, kind, seconds), (tag, reason) or (tag, carriage)");
    return PyTuple_GET_ITEM(tuple, i);
}

double number(PyObject* object) {
    const double value = PyFloat_AsDouble(object);
    if (value == -1.0 && PyErr_Occurred()) throw py::error_already_set();
    return value;
}

struct Reader {
    Numbers tags, words, resources;
    kt::Play play;

    int32_t resource(PyObject* name) {
        const int32_t number = resources.of(name);
        if (number == static_cast<int32_t>(play.links.size())) play.links.push_back(words.of(name));
        return number;
    }

    kt::Item item(PyObject* given) {
        using Does = kt::Item::Does;
        if (PyTuple_Check(given) && PyTuple_GET_SIZE(given) == 3)
            return {Does::kCompute, -1, words.of(field(given, 1, 3)), number(field(given, 2, 3)), 0, 0};
        const int32_t tag = tags.of(field(given, 0, 2));
        PyObject* how = field(given, 1, 2);
        if (!PyTuple_Check(how)) return {Does::kWait, tag, words.of(how), 0.0, 0, 0};
        const auto first = static_cast<int32_t>(play.legs.size());
        PyObject* legs = field(how, 0, 2);
        if (!PyTuple_Check(legs)) throw py::type_error("a carriage: (legs, latency)");
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(legs); ++i) {
            PyObject* leg = PyTuple_GET_ITEM(legs, i);
            play.legs.push_back({resource(field(leg, 0, 2)), number(field(leg, 1, 2))});
        }
        const auto n_legs = static_cast<int32_t>(play.legs.size()) - first;
        return {Does::kSend, tag, -1, number(field(how, 1, 2)), first, n_legs};
    }
};

py::tuple play(const std::vector<std::tuple<py::str, double, py::iterable>>& programs,
               const py::dict& capacity, bool keep_spans) {
    Reader reader;
    kt::Play& given = reader.play;
    std::vector<std::vector<py::object>> kept;  // items, where a span shows them
    for (const auto& [resource, width, items] : programs) {
        kt::Program program{reader.resource(resource.ptr()), width, {}};
        kept.emplace_back();
        for (py::handle item : items) {
            program.items.push_back(reader.item(item.ptr()));
            if (keep_spans) kept.back().push_back(py::reinterpret_borrow<py::object>(item));
        }
        given.programs.push_back(std::move(program));
    }
    given.transfer = reader.words.of("transfer");
    given.call = reader.words.of("call");
    given.tags = reader.tags.size();
    given.keep_spans = keep_spans;
    for (int32_t r = 0; r < reader.resources.size(); ++r) {
        const py::object& name = reader.resources[r];
        given.capacity.push_back(capacity.contains(name) ? capacity[name].cast<double>() : 1.0);
    }
    const kt::Played played = kt::play(given);

    py::list idle, spans, waiting;
    for (const auto& sums : played.idle) {
        py::dict reasons;
        for (const kt::Sum& sum : sums) reasons[reader.words[sum.word]] = sum.seconds;
        idle.append(reasons);
    }
    py::dict used, path;
    for (const kt::Sum& sum : played.used) used[reader.resources[sum.word]] = sum.seconds;
    for (const kt::Sum& sum : played.path) path[reader.words[sum.word]] = sum.seconds;
    for (const kt::Span& span : played.spans) {
        if (span.actor < 0)
            spans.append(
                py::make_tuple(reader.tags[span.tag], reader.resources[span.resource], span.start, span.end));
        else
            spans.append(py::make_tuple(span.actor, kept[span.actor][span.item], span.start, span.end));
    }
    for (int32_t tag : played.waiting) waiting.append(reader.tags[tag]);
    return py::make_tuple(played.ended, played.work, idle, used, path, spans, waiting);
}

kt::Resource& busy(kt::Resource& resource) {
    if (resource.idle()) throw py::index_error("no task is left");
    return resource;
}

}  // namespace

void bind_event_loop(py::module_& m) {
    m.def("play", &play, py::arg("programs"), py::arg("capacity"), py::arg("keep_spans"));
    py::class_<kt::Resource>(m, "Resource")
        .def(py::init<double, double>(), py::arg("capacity"), py::arg("since") = 0.0)
        .def("begin", &kt::Resource::begin, py::arg("number"), py::arg("seconds"), py::arg("width"),
             py::arg("now"))
        .def("foresee", [](kt::Resource& resource) { return busy(resource).foresee(); })
        .def(
            "end", [](kt::Resource& resource, double now) { return busy(resource).end(now); }, py::arg("now"))
        .def_property_readonly("idle", &kt::Resource::idle)
        .def_property_readonly("version", &kt::Resource::version);
}
