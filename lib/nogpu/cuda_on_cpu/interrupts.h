// A kernel that never ends is ended: by Ctrl-C (Jupyter's stop button), or after a time limit of
// CUDA_ON_CPU_TIMEOUT seconds (300). On a GPU it would hang until the process is killed. And one
// that touches memory that is not there ends alone, and not with it the whole process.
//
// Python hears of none of it: the launch raises an error. All arrive as signals. The handler may
// leave the kernel where it stands, by switching to the scheduler's stack, because a kernel holds
// no locks and owns no memory.
#pragma once
namespace cuda_on_cpu {

static volatile sig_atomic_t stop_signal = 0;  // the signal that came, until the launch ends
static pthread_t launching_thread;
static struct sigaction python_handler;

CUDA_ON_CPU_RUNTIME static std::string stop_message() {
  if (stop_signal == SIGINT) return "interrupted";
  return "still running after the time limit (CUDA_ON_CPU_TIMEOUT seconds): a loop whose condition "
         "stays true, or a thread that waits for a value that no other writes";
}

// The instruction at which the signal came, as the address behind a call would be; null where it is
// unknown.
CUDA_ON_CPU_RUNTIME static void* interrupted_at(void* context) {
#if defined(__x86_64__)
  auto registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  return reinterpret_cast<void*>(registers[REG_RIP] + 1);
#else
  return nullptr;
#endif
}

CUDA_ON_CPU_RUNTIME static void on_signal(int signal, siginfo_t*, void* context) {
  if (!pthread_equal(pthread_self(), launching_thread)) {
    pthread_kill(launching_thread, signal);
    return;
  }
  stop_signal = signal;  // the scheduler looks at it before each turn
  if (!in_kernel) return;
  in_kernel = false;  // the making of the message is not the kernel's
  fail_in_kernel(stop_message(), {}, interrupted_at(context));
}

// What a processor reports at once, and a GPU late or never.
constexpr int kFaults[] = {SIGSEGV, SIGBUS, SIGFPE};
static struct sigaction handler_of_fault[3];

CUDA_ON_CPU_RUNTIME static void on_fault(int signal, siginfo_t*, void* context) {
  if (!in_kernel || !pthread_equal(pthread_self(), launching_thread)) {
    // Not the kernel's: whoever was there before gets it, as this instruction is tried again.
    for (int k = 0; k < 3; ++k) {
      if (kFaults[k] == signal) sigaction(signal, &handler_of_fault[k], nullptr);
    }
    return;
  }
  in_kernel = false;
  fail_in_kernel(
      signal == SIGFPE
          ? "an integer is divided by zero; a GPU goes on with a wrong number"
          : "touches memory that is not there; with checked=True (or CUDA_ON_CPU_CHECKED=1) "
            "the error names the element",
      {}, interrupted_at(context));
}

// Holds these signals from its making to its end: the time of one launch.
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
    catch_faults();
  }
  CUDA_ON_CPU_RUNTIME ~Interruptible() {
    for (int k = 0; k < 3; ++k) sigaction(kFaults[k], &handler_of_fault[k], nullptr);
    sigaltstack(&previous_stack_, nullptr);
    if (holds_timer_) timer_delete(timer_);
    if (holds_timer_) sigaction(timer_signal_, &previous_timer_handler_, nullptr);
    if (holds_interrupt_) sigaction(SIGINT, &python_handler, nullptr);
  }

 private:
  // On a stack of their own: that of the thread may be what has run out.
  CUDA_ON_CPU_RUNTIME void catch_faults() {
    static char memory[64 << 10];
    stack_t stack = {};
    stack.ss_sp = memory;
    stack.ss_size = sizeof memory;
    sigaltstack(&stack, &previous_stack_);
    struct sigaction ours = {};
    ours.sa_sigaction = on_fault;
    ours.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    for (int k = 0; k < 3; ++k) sigaction(kFaults[k], &ours, &handler_of_fault[k]);
  }

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
  stack_t previous_stack_ = {};
  int timer_signal_ = SIGRTMIN + 4;
  timer_t timer_;
  struct sigaction previous_timer_handler_;
};

}  // namespace cuda_on_cpu
