package gateway_test

import (
	"bytes"
	"compress/gzip"
	"io"
	"testing"

	"github.com/klauspost/compress/zstd"
	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/mooncake"
)

// takesMessages are engines that take hand-offs of messages.
func takesMessages(o options) options {
	o = nixl(o)
	for _, list := range [][]refengine.Config{o.prefill, o.decode} {
		for i := range list {
			if list[i].Version == "" {
				list[i].Version = "0.32.0"
			}
		}
	}
	return o
}

// nixl are engines of vLLM. Those of vllm-ascend do not serve responses.
func nixl(o options) options {
	o.profile.Connector = mooncake.NIXLPull
	if o.prefill == nil {
		o.prefill = []refengine.Config{{KV: refengine.KV{PrefixCache: 4096}, Answers: refengine.Answers{PromptTokensDetails: true}}}
	}
	if o.decode == nil {
		o.decode = []refengine.Config{{DPSize: 2, Answers: refengine.Answers{PromptTokensDetails: true}}}
	}
	for _, list := range [][]refengine.Config{o.prefill, o.decode} {
		for i := range list {
			list[i].Connector = refengine.NIXLPull
		}
	}
	return o
}

// packed is a body in a content coding.
func packed(t testing.TB, how, body string) string {
	var b bytes.Buffer
	var w io.WriteCloser = gzip.NewWriter(&b)
	if how == "zstd" {
		z, err := zstd.NewWriter(&b)
		require.NoError(t, err)
		w = z
	}
	_, err := io.WriteString(w, body)
	require.NoError(t, err)
	require.NoError(t, w.Close())
	return b.String()
}
