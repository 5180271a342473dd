// A kernel that never ends is ended: by Ctrl-C (Jupyter's stop button), or after a time limit of
// CUDA_ON_CPU_TIMEOUT seconds (300). On a GPU it would hang until the process is killed.
//
// Python hears of neither: the launch raises an error. Both arrive as signals. The handler may
// leave the kernel where it stands, by switching to the scheduler's stack, because a kernel holds
// no locks and owns no memory.
#pragma once
namespace cuda_on_cpu {

static volatile sig_atomic_t stop_signal = 0;  // the signal that came, until the launch ends
static pthread_t launching_thread;
static struct sigaction python_handler;

CUDA_ON_CPU_RUNTIME static std::string stop_message() {
  if (stop_signal == SIGINT) return "interrupted";
  return "still running after the time limit (CUDA_ON_CPU_TIMEOUT seconds): does it ever end? A "
         "thread may wait for a value that no other thread writes";
}

CUDA_ON_CPU_RUNTIME static void on_signal(int signal, siginfo_t*, void*) {
  if (!pthread_equal(pthread_self(), launching_thread)) {
    pthread_kill(launching_thread, signal);
    return;
  }
  stop_signal = signal;  // the scheduler looks at it before each turn
  if (in_kernel) fail_in_kernel(stop_message(), {});
}

// Holds the two signals from its making to its end: the time of one launch.
class Interruptible {
 public:
  CUDA_ON_CPU_RUNTIME Interruptible() {
    stop_signal = 0;
    launching_thread = pthread_self();
    struct sigaction ours = {};
    ours.sa_sigaction = on_signal;
    ours.sa_flags = SA_SIGINFO | SA_NODEFER;  // the handler may not return: block nothing
    sigaction(SIGINT, nullptr, &python_handler);
    holds_interrupt_ = python_handler.sa_handler != SIG_DFL && python_handler.sa_handler != SIG_IGN;
    if (holds_interrupt_) sigaction(SIGINT, &ours, nullptr);
    start_timer(ours);
  }
  CUDA_ON_CPU_RUNTIME ~Interruptible() {
    if (holds_timer_) timer_delete(timer_);
    if (holds_timer_) sigaction(timer_signal_, &previous_timer_handler_, nullptr);
    if (holds_interrupt_) sigaction(SIGINT, &python_handler, nullptr);
  }

 private:
  CUDA_ON_CPU_RUNTIME void start_timer(const struct sigaction& ours) {
    const char* text = getenv("CUDA_ON_CPU_TIMEOUT");
    double seconds = text ? atof(text) : 300;
    if (seconds <= 0) return;
    sigevent event = {};
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = timer_signal_;
    event._sigev_un._tid = static_cast<pid_t>(syscall(SYS_gettid));
    if (timer_create(CLOCK_MONOTONIC, &event, &timer_) != 0) return;
    holds_timer_ = true;
    sigaction(timer_signal_, &ours, &previous_timer_handler_);
    itimerspec limit = {};
    limit.it_value.tv_sec = static_cast<time_t>(seconds);
    limit.it_value.tv_nsec = static_cast<long>((seconds - floor(seconds)) * 1e9);
    timer_settime(timer_, 0, &limit, nullptr);
  }

  bool holds_interrupt_ = false, holds_timer_ = false;
  int timer_signal_ = SIGRTMIN + 4;
  timer_t timer_;
  struct sigaction previous_timer_handler_;
};

}  // namespace cuda_on_cpu
