package gateway_test

import (
	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/config"
)

func together(more func(*config.Config)) options {
	return options{
		mixed: []refengine.Config{{DPSize: 2, PrefixCache: 4096, PromptTokensDetails: true}},
		configure: func(cfg *config.Config) {
			cfg.ExposeRoute = true
			if more != nil {
				more(cfg)
			}
		},
	}
}
