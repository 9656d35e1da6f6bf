// Programs of actors that compute, wait and send messages, played through in events
// (kt_ray/timing/event_loop.py makes them and says what comes out).
#pragma once

#include <cstdint>
#include <vector>

namespace kt {

// What several tasks use at once: cores, a GPU, a link. All of them run at rate min(1, capacity / demand).
// `served_` is the work that a task present from the start would have got; a task ends when it has grown by
// its seconds. One rate for all keeps the order of ends a heap's.
class Resource {
  public:
    explicit Resource(double capacity, double since = 0.0) : capacity_(capacity), since_(since) {}

    // A task that would take `seconds` alone. number: orders tasks that end at once. Returns whether the next
    // end must be foreseen anew.
    bool begin(int64_t number, double seconds, double width, double now);
    // When the next task ends. A change makes it void: what is foreseen then has another version.
    double foresee();
    // The next task ends, as foreseen. Returns its number; if tasks are left, theirs is to be foreseen next.
    int64_t end(double now);

    bool idle() const { return tasks_.empty(); }
    int64_t version() const { return version_; }
    double used() const { return used_; }  // seconds of its capacity

  private:
    struct Task {
        double end;
        int64_t number;
        double width;
        bool operator>(const Task& other) const {
            return end != other.end ? end > other.end : number > other.number;
        }
    };

    void advance(double now);
    void want(double demand);

    double capacity_, since_;
    double demand_ = 0.0, rate_ = 1.0, served_ = 0.0, used_ = 0.0;
    int64_t version_ = 0;
    std::vector<Task> tasks_;  // a heap, the first to end in front
};

// A part of a message's way: seconds on a resource, one unit of it.
struct Leg {
    int32_t resource;
    double seconds;
};

// What an actor does next.
struct Item {
    enum class Does : uint8_t { kCompute, kWait, kSend };
    Does does;
    int32_t tag;                // of the message it waits for or sends
    int32_t word;               // kCompute: its kind; kWait: the reason
    double seconds;             // kCompute: alone on its resource; kSend: latency after the legs
    int32_t first_leg, n_legs;  // kSend: in Play::legs
};

struct Program {
    int32_t resource;
    double width;
    std::vector<Item> items;
};

// Everything that happens in one stretch of a step. Strings and tags are numbers here.
struct Play {
    std::vector<double> capacity;  // of every resource
    std::vector<int32_t> links;    // of every resource, the word for a message on it
    std::vector<Leg> legs;
    std::vector<Program> programs;
    int32_t tags = 0;
    int32_t transfer = 0;  // the word for waiting for a message that is on its way
    int32_t call = 0;      // and for its latency, in a chain
    bool keep_spans = false;
};

struct Span {
    int32_t actor, item;    // what an actor did
    int32_t tag, resource;  // or, where actor is -1, a message on a resource
    double start, end;
};

struct Sum {
    int32_t word;
    double seconds;
};

struct Played {
    std::vector<double> ended, work;     // per actor
    std::vector<std::vector<Sum>> idle;  // per actor
    std::vector<Sum> used;               // word: the resource; in the order of their first tasks
    std::vector<Sum> path;               // of the actor that ended last, backwards from its end
    std::vector<Span> spans;
    std::vector<int32_t> waiting;  // tags nobody sent: the programs wait for each other
};

// All programs to their ends.
Played play(const Play& given);

}  // namespace kt
