// Package edge has the sockets to clients: a listener whose connections report at once that their
// client has left, a fasthttp server with every limit set, a reader of request bodies that bounds
// their memory per caller, decoders of compressed bodies, and writers of streamed answers.
//
// It knows no models, engines or pools. The gateway provides the handler and the form of error
// answers.
package edge
