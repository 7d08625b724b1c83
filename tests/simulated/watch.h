/* What the emulator tells the detector of races, `watch.cpp`. */
#pragma once

extern "C" {
/* A block begins. The launch ends when a thread calls `abandon`. */
void watch_block(unsigned block, unsigned threads, void (*abandon)());
/* A thread goes on, or has come to its end; in between its accesses are the kernel's, and those of
   its stack are no concern. */
void watch_enter(unsigned thread, const char *stack, unsigned size);
void watch_end();
/* It waits for its block (warp < 0) or for the lanes of `mask` of its warp, and all have come. */
void watch_arrive(int warp, unsigned mask, const char *file, int line);
void watch_met(int warp);
void watch_stuck();
void watch_fence(const char *file, int line);
void watch_atomic(const void *at, unsigned size);
}
