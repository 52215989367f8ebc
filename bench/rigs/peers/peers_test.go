package main

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
)

func TestBodiesAreComparedFieldByField(t *testing.T) {
	body := func(text string) (v map[string]any) {
		require.NoError(t, json.Unmarshal([]byte(text), &v))
		return v
	}
	theirs := body(`{"model":"ref","stream":false,"max_tokens":1,"min_tokens":1,"kv_transfer_params":{"do_remote_decode":true,"remote_host":"a","remote_port":null}}`)
	ours := body(`{"model":"ref","stream":false,"max_tokens":1,"cache_salt":"x","kv_transfer_params":{"do_remote_decode":false,"remote_host":"b","remote_port":1}}`)
	require.Equal(t, []difference{
		{"prefill", "cache_salt", "–", "one of its own"},
		{"prefill", "kv_transfer_params.do_remote_decode", "`true`", "`false`"},
		{"prefill", "kv_transfer_params.remote_port", "`null`", "one of its own"},
		{"prefill", "min_tokens", "`1`", "–"},
	}, compare("prefill", theirs, ours))
	require.Empty(t, compare("decode", ours, ours))
}

func TestComplaintsAreOfWhatARouterDoes(t *testing.T) {
	require.Empty(t, complaints("prefill 1", refengine.Events[int64]{Probes: 3, Pulls: 3, Finished: 3}))
	require.Equal(t, []string{"decode 1: 2 prompts computed by a decode engine"},
		complaints("decode 1", refengine.Events[int64]{LocalPrefills: 2}))
}
