package main

import "evenkeel/bench/rigs/asked"

// The two routes that are asked.
const (
	completions = "/v1/completions"
	chat        = "/v1/chat/completions"
)

type (
	body   = asked.Body
	answer = asked.Answer // documentOf reads it
)

var ask, listen = asked.Ask, asked.Listen
