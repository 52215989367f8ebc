package main

import (
	"context"
	"fmt"

	"evenkeel/bench/rigs/real/ranks"
	"evenkeel/bench/rigs/real/vllm"
	"evenkeel/bench/rigs/testbed"
)

// placeTogether has engines that prefill and decode, without a connector: a group of two
// data-parallel ranks, which step together, and one engine that is a group by itself.
func (w *site) placeTogether(ctx context.Context, installed *vllm.Installation) error {
	if _, err := installed.Model(ctx); err != nil {
		return err
	}
	plugin, err := ranks.Plugin(w.World)
	if err != nil {
		return err
	}
	w.behind = []string{"d0", "d1"}
	w.engines = map[string]*engine{
		"plain": {port: w.at(10), side: w.at(60)},
		"d0":    {port: w.at(12), side: w.at(64)},
		"d1":    {port: w.at(14), side: w.at(68), ranks: ranks.Count},
	}
	for _, e := range w.engines {
		e.mixture, e.plugins, e.flags = true, ":"+plugin, []string{"--max-num-batched-tokens", fmt.Sprint(budget), "--api-server-count", "1"}
	}
	return nil
}

// configTogether is the proxy's config file.
func (w *site) configTogether(s setting) string {
	list := w.listed(s, fmt.Sprintf(", token_budget: %d", budget))
	for i, url := range s.decode {
		profile := "one"
		if w.ranksAt(url) > 0 {
			profile = "ranks"
		}
		list[i] += ", profile: " + profile
	}
	return fmt.Sprintf(`listen: %q
admin: {listen: %q}
profiles:
  one: {connector: none, chat_resume: continue_final_message}
  ranks: {connector: none, chat_resume: continue_final_message, dp_mode: internal}
prefill:
  index: {tokenize: engine, tokenize_timeout: 2s}
  queue: {timeout: 5m}
expose_route_headers: true
%s`, w.proxy.Clients, w.proxy.Address, testbed.Aggregated(list))
}

// together are rows with these engines.
func together(rows []row) (all []row) {
	for _, r := range rows {
		r.engines = []string{"plain", "d0", "d1"}
		all = append(all, r)
	}
	return all
}

// alone are rows that want an engine that computes its prompts itself.
var alone = []row{
	shape{name: "completion, echo with logprobs", path: completions,
		body: completes(body{"prompt": ids(100, 140), "max_tokens": 8, "echo": true, "logprobs": 2})}.row(),
}
