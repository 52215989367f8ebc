package mooncake

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// ascendAnswer is what a prefill engine of vllm-ascend answers to a probe.
const ascendAnswer = `{"id":"chatcmpl-1d4f13a41a370885","object":"chat.completion","created":1795281407,"model":"ref","choices":[{"index":0,` +
	`"message":{"role":"assistant","content":" t8101","refusal":null,"annotations":null,"audio":null,"function_call":null,"reasoning":null},"logprobs":null,"finish_reason":"length",` +
	`"stop_reason":null,"token_ids":[1056677],"routed_experts":null}],"service_tier":null,"system_fingerprint":"vllm","usage":{"prompt_tokens":2,"total_tokens":3,"completion_tokens":1,` +
	`"prompt_tokens_details":{"cached_tokens":0,"created_cache_tokens":0,"multimodal_tokens":null},"completion_tokens_details":null},"prompt_logprobs":null,"prompt_token_ids":[615657,745272],` +
	`"prompt_text":null,"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[0]],"remote_engine_id":"3f0e2c51-6a0c-4a8e-9a55-0d6a1e2b7c11_dp0",` +
	`"remote_request_id":"chatcmpl-1d4f13a41a370885-0319dd3b","remote_host":"127.0.0.1","remote_port":18113,"remote_pcp_size":1,"remote_dcp_size":1,"remote_ptp_size":1,"last_token_id":1056677,` +
	`"remote_multi_nodes_meta_mapping":{"0":{"host":"127.0.0.1","engine_id":"3f0e2c51-6a0c-4a8e-9a55-0d6a1e2b7c11_dp0","handshake_port":18113}},"num_prompt_blocks":1},` +
	`"ec_transfer_params":null,"metrics":null}`

func BenchmarkReadProbe(b *testing.B) {
	p, answer, known := Profile{Connector: AscendMooncakeV1}, []byte(ascendAnswer), func(host string) bool { return host == "127.0.0.1" }
	b.ReportAllocs()
	for b.Loop() {
		if _, err := p.ReadProbe(answer, nil, known); err != nil {
			b.Fatal(err)
		}
	}
}

func TestReadingAProbeCopiesWhatItKeepsOnly(t *testing.T) {
	p, answer, known := Profile{Connector: AscendMooncakeV1}, []byte(ascendAnswer), func(host string) bool { return host == "127.0.0.1" }
	require.LessOrEqual(t, testing.AllocsPerRun(100, func() {
		if _, err := p.ReadProbe(answer, nil, known); err != nil {
			t.Fatal(err)
		}
	}), 4.0)
}
