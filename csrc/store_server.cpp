// The authenticated key-value store of a job's ranks. Only frontier_llm/comm/authenticated_store.py uses this library.
//
// It opens no socket. Python authenticates connections (comm/handshake.py) and passes them on. One thread answers all
// requests, without the interpreter lock. A wait costs nothing until its key exists. Requests and answers are lists of
// byte strings: u32 count, u64 lengths[count], bytes (little endian; comm/authenticated_store.py). The library has a
// plain C ABI, is loaded with ctypes, and needs neither Python nor torch.

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#define FL_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kAbi = 1;
constexpr uint32_t kMostParts =
    1 << 16;  // a request for the ids of all communicators of a large machine has some hundreds
constexpr uint64_t kMostBytes = 64ull << 20;

using Parts = std::vector<std::string>;

int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
}

struct Client {
    int fd;
    std::string in, out;
    Parts waiting;       // request that waits for keys
    size_t missing = 0;  // index in `waiting` of the first key that does not exist yet
    int64_t deadline_ns = 0;
};

void append(std::string& out, const Parts& parts) {
    const uint32_t count = uint32_t(parts.size());
    out.append(reinterpret_cast<const char*>(&count), 4);
    for (const std::string& part : parts) {
        const uint64_t length = part.size();
        out.append(reinterpret_cast<const char*>(&length), 8);
    }
    for (const std::string& part : parts) out += part;
}

// Removes a complete list from the front of `in`. Returns false if the list is incomplete. Sets `broken` if the list is
// longer than any list that a rank sends.
bool take(std::string& in, Parts& parts, bool& broken) {
    if (in.size() < 4) return false;
    uint32_t count;
    std::memcpy(&count, in.data(), 4);
    if ((broken = count == 0 || count > kMostParts)) return false;
    uint64_t end = 4 + 8ull * count;
    if (in.size() < end) return false;
    std::vector<uint64_t> lengths(count);
    std::memcpy(lengths.data(), in.data() + 4, 8ull * count);
    for (const uint64_t length : lengths)
        if ((broken = length > kMostBytes || (end += length) > kMostBytes)) return false;
    if (in.size() < end) return false;
    size_t at = 4 + 8ull * count;
    for (const uint64_t length : lengths) {
        parts.emplace_back(in, at, length);
        at += length;
    }
    in.erase(0, at);
    return true;
}

class Server {
   public:
    Server() : epoll_(epoll_create1(EPOLL_CLOEXEC)), wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
        watch(wake_, EPOLLIN, EPOLL_CTL_ADD);
        thread_ = std::thread([this] { run(); });
        pthread_setname_np(thread_.native_handle(), "store server");
    }

    ~Server() {
        hand_over(-1);
        thread_.join();
        for (auto& [fd, client] : clients_) close(fd);
        close(wake_);
        close(epoll_);
    }

    Server(const Server&) = delete;
    Server& operator=(const Server&) = delete;

    // Adds a connection, which the server then owns. If `fd` is -1, the server ends. Can be called from any thread.
    void hand_over(int fd) {
        {
            std::lock_guard<std::mutex> guard(mutex_);
            arriving_.push_back(fd);
        }
        const uint64_t one = 1;
        if (write(wake_, &one, 8) < 0) return;  // the counter is full, so the thread is awake
    }

   private:
    void watch(int fd, uint32_t events, int operation) {
        epoll_event event = {};
        event.events = events;
        event.data.fd = fd;
        epoll_ctl(epoll_, operation, fd, &event);
    }

    void run() {
        epoll_event events[64];
        for (;;) {
            const int count = epoll_wait(epoll_, events, 64, until_next_deadline_ms());
            for (int i = 0; i < count; ++i) {
                const int fd = events[i].data.fd;
                if (fd == wake_) {
                    if (!admit()) return;
                } else if (const auto found = clients_.find(fd);
                           found != clients_.end() && !converse(*found->second, events[i].events)) {
                  drop(fd);
                }
            }
            expire();
        }
    }

    bool admit() {
        uint64_t ignored;
        if (read(wake_, &ignored, 8) < 0 && errno != EAGAIN) return false;
        std::vector<int> arrived;
        {
            std::lock_guard<std::mutex> guard(mutex_);
            arrived.swap(arriving_);
        }
        for (const int fd : arrived) {
            if (fd < 0) return false;
            clients_[fd] = std::make_unique<Client>(Client{fd, {}, {}, {}});
            watch(fd, EPOLLIN, EPOLL_CTL_ADD);
        }
        return true;
    }

    void drop(int fd) {
        forget_wait(*clients_[fd]);
        clients_.erase(fd);
        close(fd);
    }

    // Returns false if the client has disconnected.
    bool converse(Client& client, uint32_t events) {
        if (events & EPOLLIN) {
            char block[65536];
            const ssize_t count = recv(client.fd, block, sizeof block, MSG_DONTWAIT);
            if (count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR)) return false;
            if (count > 0) client.in.append(block, size_t(count));
        } else if (events & (EPOLLHUP | EPOLLERR)) {
            return false;
        }
        return answer_all(client) && flush(client);
    }

    bool answer_all(Client& client) {
        bool broken = false;
        while (client.waiting.empty()) {
            Parts question;
            if (!take(client.in, question, broken)) break;
            answer(client, std::move(question));
        }
        return !broken;
    }

    bool flush(Client& client) {
        while (!client.out.empty()) {
            const ssize_t count = send(client.fd, client.out.data(), client.out.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
            if (count < 0 && errno == EINTR) continue;
            if (count < 0 && errno != EAGAIN) return false;
            if (count < 0) {
                watch(client.fd, EPOLLIN | EPOLLOUT, EPOLL_CTL_MOD);
                return true;
            }
            client.out.erase(0, size_t(count));
            if (client.out.empty()) watch(client.fd, EPOLLIN, EPOLL_CTL_MOD);
        }
        return true;
    }

    void answer(Client& client, Parts question) {
        const std::string& operation = question[0];
        const size_t arguments = question.size() - 1;
        auto reply = [&](Parts values) {
            values.insert(values.begin(), "ok");
            append(client.out, values);
        };
        if (operation == "set" && arguments == 2) {
            put(question[1], question[2]);
            reply({});
        } else if (operation == "add" && arguments == 2) {
          const std::optional<int64_t> amount = number(question[2]),
                                       before = values_.count(question[1]) ? number(values_[question[1]]) : 0;
          if (!amount || !before)
            return append(client.out, {"error", "the value of key " + question[1] + " is not an integer"});
          const std::string sum = std::to_string(int64_t(uint64_t(*before) + uint64_t(*amount)));
          put(question[1], sum);
          reply({sum});
        } else if (operation == "check") {
            bool all = true;
            for (size_t i = 1; i <= arguments; ++i) all = all && values_.count(question[i]);
            reply({all ? "1" : ""});
        } else if (operation == "compare_set" && arguments == 3) {
            const auto found = values_.find(question[1]);
            const std::string before = found == values_.end() ? "" : found->second;
            const bool matches = found == values_.end() ? question[2].empty() : before == question[2];
            if (matches) put(question[1], question[3]);
            reply({matches ? question[3] : found == values_.end() ? question[2] : before});
        } else if (operation == "delete_key" && arguments == 1) {
            reply({values_.erase(question[1]) ? "1" : ""});
        } else if (operation == "num_keys" && arguments == 0) {
            reply({std::to_string(values_.size())});
        } else if ((operation == "wait" || operation == "multi_get" || operation == "get") && arguments >= 1) {
          client.deadline_ns =
              now_ns() + int64_t(std::min(std::max(0.0, std::strtod(question[1].c_str(), nullptr)), 1e9) * 1e9);
          client.waiting = std::move(question);
          client.missing = 2;
          go_on(client);
        } else {
            const std::string count = std::to_string(arguments);
            append(client.out, {"error", "the store has no operation " + operation + " with " + count + " arguments"});
        }
    }

    static std::optional<int64_t> number(const std::string& text) {
        int64_t value = 0;
        const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
        if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
        return value;
    }

    // Stores a value, and continues the requests that wait for its key.
    void put(const std::string& key, const std::string& value) {
        values_[key] = value;
        const auto found = waiters_.find(key);
        if (found == waiters_.end()) return;
        const std::set<int> fds = std::move(found->second);
        waiters_.erase(found);
        for (const int fd : fds) {
            Client& client = *clients_[fd];
            deadlines_.erase({client.deadline_ns, fd});
            go_on(client);
            if (client.waiting.empty() && !(answer_all(client) && flush(client)))
              shutdown(fd, SHUT_RDWR);  // the thread then receives an event and removes the client
        }
    }

    // Answers a waiting request if all its keys exist. Otherwise registers it under the first key that is missing.
    void go_on(Client& client) {
        const Parts& question = client.waiting;
        while (client.missing < question.size() && values_.count(question[client.missing])) ++client.missing;
        if (client.missing < question.size()) {
            waiters_[question[client.missing]].insert(client.fd);
            deadlines_.insert({client.deadline_ns, client.fd});
            return;
        }
        Parts values = {"ok"};
        if (question[0] != "wait")
            for (size_t i = 2; i < question.size(); ++i) {
                const auto found = values_.find(question[i]);  // a key may have been deleted since
                values.push_back(found == values_.end() ? "" : found->second);
            }
        append(client.out, values);
        client.waiting.clear();
    }

    void forget_wait(Client& client) {
        if (client.waiting.empty()) return;
        const auto found = waiters_.find(client.waiting[client.missing]);
        if (found != waiters_.end()) {
            found->second.erase(client.fd);
            if (found->second.empty()) waiters_.erase(found);
        }
        deadlines_.erase({client.deadline_ns, client.fd});
    }

    int until_next_deadline_ms() const {
        if (deadlines_.empty()) return -1;
        return int(
            std::min<int64_t>(std::max<int64_t>((deadlines_.begin()->first - now_ns()) / 1'000'000 + 1, 0), 60'000));
    }

    void expire() {
        while (!deadlines_.empty() && deadlines_.begin()->first <= now_ns()) {
            const int fd = deadlines_.begin()->second;
            Client& client = *clients_[fd];
            std::string keys;
            for (size_t i = 2; i < client.waiting.size() && keys.size() < 1000; ++i)
              keys += (i > 2 ? ", " : "") + client.waiting[i];
            forget_wait(client);
            append(client.out, {"error", "wait timeout after " + client.waiting[1] + " s, keys: " + keys});
            client.waiting.clear();
            if (!(answer_all(client) && flush(client))) drop(fd);
        }
    }

    const int epoll_, wake_;
    std::thread thread_;
    std::mutex mutex_;
    std::vector<int> arriving_;
    std::unordered_map<int, std::unique_ptr<Client>> clients_;
    std::unordered_map<std::string, std::string> values_;
    std::unordered_map<std::string, std::set<int>> waiters_;  // connections by the first missing key
    std::set<std::pair<int64_t, int>> deadlines_;             // (time, connection)
};

}  // namespace

FL_EXPORT int64_t fl_store_abi() { return kAbi; }
FL_EXPORT void* fl_store_open() { return new Server; }
FL_EXPORT void fl_store_serve(void* server, int fd) { static_cast<Server*>(server)->hand_over(fd); }
FL_EXPORT void fl_store_close(void* server) { delete static_cast<Server*>(server); }
