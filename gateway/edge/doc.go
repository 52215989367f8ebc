// Package edge is the client-facing socket layer: a listener whose
// connections report at once that their client has left, a fasthttp server with
// every limit set, the reader of request bodies, which charges the callers
// for them, the decoders of packed bodies, and the writers of streamed answers.
//
// It knows HTTP heads and sockets and nothing about models, engines or pools:
// the gateway brings the handler and the shape of its error answers.
package edge
