package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"evenkeel/bench/rigs/real/recorder"
	"evenkeel/bench/rigs/real/recording"
	"evenkeel/bench/rigs/real/vllm"
)

// record starts a plain engine, then a prefill and a decode engine, and writes
// down what they answer. The prefill engine has so few blocks that it tells of
// removed ones, too.
func record(ctx context.Context, o options, installed *vllm.Installation, out io.Writer) error {
	dir, err := os.MkdirTemp("", "evenkeel-record-")
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "the engines' logs are in %s\n", dir)
	if err := os.Setenv("VLLM_SERVER_DEV_MODE", "1"); err != nil { // for /reset_prefix_cache
		return err
	}
	address := func(offset int) string { return fmt.Sprintf("127.0.0.1:%d", o.port+offset) }
	modelPath := filepath.Join(o.cache, "tiny")
	start := func(name string, port, blocks int, flags ...string) (*engine, error) {
		e := &engine{name: name, port: o.port + port, side: o.port + port + 40, installed: installed, log: filepath.Join(dir, name+".log"),
			flags: append([]string{"--num-gpu-blocks-override", fmt.Sprint(blocks)}, flags...)}
		if err := e.start(); err != nil {
			return nil, err
		}
		return e, e.ready(ctx)
	}
	plain, err := start("plain", 0, 2000)
	if plain != nil {
		defer plain.Stop()
	}
	if err != nil {
		return err
	}
	if err := recorder.Record(ctx, recorder.Engines{Plain: address(0), ModelPath: modelPath}, recording.Dir(), out); err != nil {
		return err
	}
	plain.Stop()
	events := fmt.Sprintf(`{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:%d","replay_endpoint":"tcp://*:%d"}`, o.port+10, o.port+11)
	prefill, err := start("prefill", 1, 90, append(o.handsOver("kv_producer"), "--kv-events-config", events)...)
	if prefill != nil {
		defer prefill.Stop()
	}
	if err != nil {
		return err
	}
	decode, err := start("decode", 2, 2000, o.handsOver("kv_consumer")...)
	if decode != nil {
		defer decode.Stop()
	}
	if err != nil {
		return err
	}
	return recorder.Record(ctx, recorder.Engines{Prefill: address(1), Decode: address(2), Events: address(10), Replay: address(11),
		ModelPath: modelPath}, recording.Dir(),
		out)
}
