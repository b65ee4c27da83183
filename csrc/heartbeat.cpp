// Sends the heartbeats of one rank to torch's TCPStore, from a thread that needs no interpreter lock. A rank whose main
// thread holds the lock for seconds (import of a library, long call into C) is therefore not reported as dead. Only
// frontier_llm/comm/heartbeat.py uses this library.
//
// Python passes a connected socket. Each heartbeat is a SET request of TCPStore's protocol, which has no answer:
// u8 1, u64 length, key, u64 length, value. The value is the newest text from Python with the number of the heartbeat
// and "}" appended. Plain C ABI, loaded with ctypes; no Python, no torch.

#include <pthread.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#define FL_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kAbi = 1;
constexpr char kSet = 1;             // c10d::detail::QueryType::SET
constexpr int64_t kSendSeconds = 30;  // timeout if the socket's buffer is full: the store is stopped

void append(std::string& out, const std::string& text) {
    const uint64_t length = text.size();
    out.append(reinterpret_cast<const char*>(&length), 8);
    out += text;
}

class Sender {
   public:
    Sender(int fd, std::string key, double longest_pause_s)
        : fd_(fd), key_(std::move(key)), longest_pause_(std::chrono::duration<double>(longest_pause_s)) {
        const timeval limit = {kSendSeconds, 0};
        setsockopt(fd_, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
        thread_ = std::thread([this] { run(); });
        pthread_setname_np(thread_.native_handle(), "heartbeat");
    }

    ~Sender() {
        {
            std::lock_guard<std::mutex> guard(mutex_);
            ended_ = true;
        }
        wake_.notify_one();
        shutdown(fd_, SHUT_RDWR);  // ends a send() in which the thread waits
        thread_.join();
        close(fd_);
    }

    Sender(const Sender&) = delete;
    Sender& operator=(const Sender&) = delete;

    void update(std::string text) {
        {
            std::lock_guard<std::mutex> guard(mutex_);
            text_ = std::move(text);
            is_new_ = true;
        }
        wake_.notify_one();
    }

    int64_t sent() const { return sent_; }
    bool failed() const { return failed_; }

   private:
    void run() {
        for (;;) {
            std::string value;
            {
                std::unique_lock<std::mutex> guard(mutex_);
                wake_.wait_for(guard, longest_pause_, [this] { return is_new_ || ended_; });
                if (ended_) return;
                if (text_.empty()) continue;
                is_new_ = false;
                value = text_;
            }
            if (!send_one(value + std::to_string(sent_ + 1) + "}")) {
                failed_ = true;
                return;
            }
            ++sent_;
        }
    }

    bool send_one(const std::string& value) {
        std::string message(1, kSet);
        append(message, key_);
        append(message, value);
        for (size_t at = 0; at < message.size();) {
            const ssize_t count = ::send(fd_, message.data() + at, message.size() - at, MSG_NOSIGNAL);
            if (count < 0 && errno == EINTR) continue;
            if (count <= 0) return false;
            at += size_t(count);
        }
        return true;
    }

    const int fd_;
    const std::string key_;
    const std::chrono::duration<double> longest_pause_;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::string text_;
    bool is_new_ = false;
    bool ended_ = false;
    std::atomic<int64_t> sent_{0};
    std::atomic<bool> failed_{false};
    std::thread thread_;
};

}  // namespace

FL_EXPORT int64_t fl_heartbeat_abi() { return kAbi; }
FL_EXPORT void* fl_heartbeat_open(int fd, const char* key, double longest_pause_s) {
  return new Sender(fd, key, longest_pause_s);
}
FL_EXPORT void fl_heartbeat_update(void* sender, const char* text) { static_cast<Sender*>(sender)->update(text); }
FL_EXPORT int64_t fl_heartbeat_sent(void* sender) { return static_cast<Sender*>(sender)->sent(); }
FL_EXPORT int fl_heartbeat_failed(void* sender) { return static_cast<Sender*>(sender)->failed(); }
FL_EXPORT void fl_heartbeat_close(void* sender) { delete static_cast<Sender*>(sender); }
