// Random programs through the event loop: what holds for every one of them, under sanitizers.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>

#include "event_loop.h"

namespace {

void check(bool holds, const char* what, int seed) {
    if (holds) return;
    std::printf("seed %d: not so: %s\n", seed, what);
    std::exit(1);
}

// Rounds in which every actor computes, writes to all others, and waits for what they wrote a round before.
kt::Play random_play(int seed, int rounds) {
    std::mt19937 random(seed);
    const auto below = [&](int n) { return static_cast<int>(random() % n); };
    const auto seconds = [&] { return below(5) / 4.0; };  // many ends at once, and many that take no time
    kt::Play play;
    const int actors = 2 + below(4), links = 1 + below(3);
    for (int r = 0; r < actors + links; ++r) {
        play.capacity.push_back(1.0 + below(3) / 2.0);
        play.links.push_back(3 + r);
    }
    play.programs.resize(actors);
    play.tags = rounds * actors * actors;
    play.transfer = 1, play.call = 2;
    play.keep_spans = true;
    const auto tag = [&](int round, int from, int to) { return (round * actors + from) * actors + to; };
    for (int a = 0; a < actors; ++a) {
        kt::Program& program = play.programs[a];
        program.resource = below(actors);  // shared with others, or not
        program.width = 0.5 + below(3) / 2.0;
        for (int round = 0; round < rounds; ++round) {
            program.items.push_back({kt::Item::Does::kCompute, -1, 0, seconds(), 0, 0});
            for (int to = 0; to < actors; ++to) {
                const auto first = static_cast<int32_t>(play.legs.size());
                const int32_t legs = below(4);
                for (int n = 0; n < legs; ++n) play.legs.push_back({actors + below(links), seconds()});
                program.items.push_back(
                    {kt::Item::Does::kSend, tag(round, a, to), -1, seconds(), first, legs});
            }
            for (int from = 0; round > 0 && from < actors; ++from)
                program.items.push_back({kt::Item::Does::kWait, tag(round - 1, from, a), 0, 0.0, 0, 0});
        }
    }
    return play;
}

double sum(const std::vector<kt::Sum>& sums) {
    return std::accumulate(sums.begin(), sums.end(), 0.0,
                           [](double so_far, const kt::Sum& own) { return so_far + own.seconds; });
}

}  // namespace

int main() {
    for (int seed = 0; seed < 300; ++seed) {
        kt::Play play = random_play(seed, 1 + seed % 12);
        const kt::Played played = kt::play(play);
        check(played.waiting.empty(), "every message arrives", seed);
        const double end = *std::max_element(played.ended.begin(), played.ended.end());
        const double slack = 1e-9 * (1 + end);
        for (size_t a = 0; a < play.programs.size(); ++a) {
            double wanted = 0;
            for (const kt::Item& item : play.programs[a].items)
                if (item.does == kt::Item::Does::kCompute) wanted += item.seconds;
            check(played.work[a] == wanted, "an actor computes what its program says", seed);
            double spent = 0;
            for (const kt::Span& span : played.spans)
                if (span.actor == static_cast<int32_t>(a)) spent += span.end - span.start;
            check(spent >= wanted - slack, "nothing is faster than alone", seed);
            check(std::abs(spent + sum(played.idle[a]) - played.ended[a]) < slack,
                  "an actor computes or waits until it ends", seed);
        }
        check(std::abs(sum(played.path) - end) < slack, "the longest chain is as long as everything", seed);
        double last = end;  // of messages that nobody waits for, too
        for (const kt::Span& span : played.spans) {
            check(0 <= span.start && span.start <= span.end, "time goes on", seed);
            last = std::max(last, span.end);
        }
        for (const kt::Sum& used : played.used)
            check(used.seconds <= play.capacity[used.word] * last + slack, "capacities are kept", seed);

        // Without the messages of one actor the others wait for ever, and that is said.
        for (kt::Item& item : play.programs[0].items)
            if (item.does == kt::Item::Does::kSend) item = {kt::Item::Does::kCompute, -1, 0, 0.0, 0, 0};
        const size_t waiting = seed % 12 ? play.programs.size() : 0;
        check(kt::play(play).waiting.size() == waiting, "who waits for ever is named", seed);
    }
    std::puts("300 plays ok");
}
