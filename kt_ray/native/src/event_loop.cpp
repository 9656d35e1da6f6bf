#include "event_loop.h"

#include <algorithm>
#include <functional>
#include <queue>

namespace kt {

bool Resource::begin(int64_t number, double seconds, double width, double now) {
    advance(now);
    const double rate = rate_;
    want(demand_ + width);
    tasks_.push_back({served_ + seconds, number, width});
    std::push_heap(tasks_.begin(), tasks_.end(), std::greater<>());
    return tasks_.front().number == number || rate_ != rate;
}

double Resource::foresee() {
    ++version_;
    const double left = tasks_.front().end - served_;
    return left > 0 ? since_ + left / rate_ : since_;
}

int64_t Resource::end(double now) {
    advance(now);
    std::pop_heap(tasks_.begin(), tasks_.end(), std::greater<>());
    const Task task = tasks_.back();
    tasks_.pop_back();
    want(tasks_.empty() ? 0.0 : demand_ - task.width);
    return task.number;
}

void Resource::advance(double now) {
    if (!tasks_.empty()) {
        const double step = (now - since_) * rate_;
        served_ += step;
        used_ += step * demand_;
    }
    since_ = now;
}

void Resource::want(double demand) {
    demand_ = demand;
    rate_ = demand > capacity_ ? capacity_ / demand : 1.0;
}

namespace {

void add(std::vector<Sum>& sums, int32_t word, double seconds) {
    for (Sum& sum : sums)
        if (sum.word == word) {
            sum.seconds += seconds;
            return;
        }
    sums.push_back({word, seconds});
}

// A stretch of an actor's or message's time and the segment it followed from.
struct Segment {
    int32_t word;
    double start, end;
    int32_t parent;  // -1: none
};

struct Actor {
    size_t next = 0;     // item of its program
    int32_t past = -1;   // the last segment of what it went through
    double since = 0.0;  // when what it does began
    bool waits = false;
};

// A message on its way.
struct Message {
    const Item* item;
    int32_t leg = 0;  // the next one
    int32_t past;     // the last segment before where it is
    double sent, since;
};

// What the loop calls next: a message arrives, or a resource ends a task, unless another version of it was
// foreseen since.
struct Due {
    double at;
    int64_t order;
    int32_t resource;  // -1: message `number`
    int64_t number;    // or the version
    bool operator>(const Due& other) const { return at != other.at ? at > other.at : order > other.order; }
};

// Whose task it is: an actor's, or a message's.
struct Owner {
    bool actor;
    int32_t index;
};

class Loop {
  public:
    explicit Loop(const Play& given)
        : given_(given),
          actors_(given.programs.size()),
          arrived_(given.tags, false),
          waiter_(given.tags, -1) {
        resources_.reserve(given.capacity.size());
        for (double capacity : given.capacity) resources_.emplace_back(capacity);
        begun_.resize(given.capacity.size(), false);
        result_.ended.resize(actors_.size());
        result_.work.resize(actors_.size());
        result_.idle.resize(actors_.size());
    }

    Played run() {
        for (size_t a = 0; a < actors_.size(); ++a) resume(static_cast<int32_t>(a));
        while (!queue_.empty()) {
            const Due due = queue_.top();
            queue_.pop();
            now_ = due.at;
            if (due.resource < 0) {
                arrive(static_cast<int32_t>(due.number));
                continue;
            }
            Resource& resource = resources_[due.resource];
            if (due.number != resource.version()) continue;
            const Owner owner = owners_[resource.end(now_)];
            if (!resource.idle()) foresee(due.resource);
            owner.actor ? done(owner.index) : carried(owner.index);
        }
        finish();
        return std::move(result_);
    }

  private:
    // Run an actor until it computes, waits, or is done.
    void resume(int32_t a) {
        const Program& program = given_.programs[a];
        Actor& actor = actors_[a];
        for (; actor.next < program.items.size(); ++actor.next) {
            const Item& item = program.items[actor.next];
            if (item.does == Item::Does::kSend) {
                messages_.push_back({&item, 0, actor.past, now_, now_});
                travel(static_cast<int32_t>(messages_.size()) - 1, false);
            } else if (item.does == Item::Does::kWait) {
                if (arrived_[item.tag]) continue;
                waiter_[item.tag] = a;
                actor.since = now_;
                actor.waits = true;
                return;
            } else if (item.seconds > 0) {
                result_.work[a] += item.seconds;
                actor.since = now_;
                task(program.resource, item.seconds, program.width, {true, a});
                return;
            }
        }
        result_.ended[a] = now_;
    }

    void done(int32_t a) {
        Actor& actor = actors_[a];
        const Item& item = given_.programs[a].items[actor.next];
        actor.past = segment(item.word, actor.since, actor.past);
        if (given_.keep_spans)
            result_.spans.push_back({a, static_cast<int32_t>(actor.next), -1, -1, actor.since, now_});
        ++actor.next;
        resume(a);
    }

    // A message goes on with its next leg. alone: nothing else is done afterwards.
    void travel(int32_t m, bool alone) {
        Message& message = messages_[m];
        const Item& item = *message.item;
        message.since = now_;
        while (message.leg < item.n_legs && leg(message).seconds <= 0) ++message.leg;
        if (message.leg < item.n_legs)
            task(leg(message).resource, leg(message).seconds, 1.0, {false, m});
        else if (alone && item.seconds == 0 && (queue_.empty() || queue_.top().at > now_))
            arrive(m);  // it would be the next of the queue
        else
            queue_.push({now_ + item.seconds, order_++, -1, m});
    }

    void carried(int32_t m) {
        Message& message = messages_[m];
        const int32_t resource = leg(message).resource;
        if (given_.keep_spans)
            result_.spans.push_back({-1, -1, message.item->tag, resource, message.since, now_});
        message.past = segment(given_.links[resource], message.since, message.past);
        ++message.leg;
        travel(m, true);
    }

    void arrive(int32_t m) {
        const Message message = messages_[m];
        const int32_t tag = message.item->tag;
        arrived_[tag] = true;
        const int32_t a = waiter_[tag];
        if (a < 0) return;
        waiter_[tag] = -1;
        Actor& actor = actors_[a];
        wait(a, given_.programs[a].items[actor.next].word, std::max(0.0, message.sent - actor.since));
        wait(a, given_.transfer, now_ - std::max(actor.since, message.sent));
        actor.past = now_ > message.since ? segment(given_.call, message.since, message.past) : message.past;
        actor.waits = false;
        ++actor.next;
        resume(a);
    }

    void wait(int32_t a, int32_t reason, double seconds) {
        if (seconds > 0) add(result_.idle[a], reason, seconds);
    }

    int32_t segment(int32_t word, double start, int32_t parent) {
        segments_.push_back({word, start, now_, parent});
        return static_cast<int32_t>(segments_.size()) - 1;
    }

    void task(int32_t r, double seconds, double width, Owner owner) {
        if (!begun_[r]) {
            begun_[r] = true;
            in_order_.push_back(r);
        }
        owners_.push_back(owner);
        const int64_t number = static_cast<int64_t>(owners_.size()) - 1;
        if (resources_[r].begin(number, seconds, width, now_)) foresee(r);
    }

    void foresee(int32_t r) {
        const double at = resources_[r].foresee();
        queue_.push({at, order_++, r, resources_[r].version()});
    }

    const Leg& leg(const Message& message) const {
        return given_.legs[message.item->first_leg + message.leg];
    }

    void finish() {
        for (size_t a = 0; a < actors_.size(); ++a)
            if (actors_[a].waits) result_.waiting.push_back(given_.programs[a].items[actors_[a].next].tag);
        for (int32_t r : in_order_) result_.used.push_back({r, resources_[r].used()});
        const auto last = std::max_element(result_.ended.begin(), result_.ended.end());
        if (last == result_.ended.end()) return;
        for (int32_t s = actors_[last - result_.ended.begin()].past; s >= 0; s = segments_[s].parent) {
            add(result_.path, segments_[s].word, segments_[s].end);
            add(result_.path, segments_[s].word, -segments_[s].start);
        }
    }

    const Play& given_;
    double now_ = 0.0;
    int64_t order_ = 0;
    std::priority_queue<Due, std::vector<Due>, std::greater<>> queue_;
    std::vector<Resource> resources_;
    std::vector<bool> begun_;
    std::vector<int32_t> in_order_;
    std::vector<Actor> actors_;
    std::vector<Message> messages_;
    std::vector<Owner> owners_;  // by number of the task
    std::vector<Segment> segments_;
    std::vector<bool> arrived_;    // by tag
    std::vector<int32_t> waiter_;  // by tag; -1: nobody
    Played result_;
};

}  // namespace

Played play(const Play& given) { return Loop(given).run(); }

}  // namespace kt
